"""Models across ranks: the mesh, layers that are cut over the ranks of one stage, and consecutive stages."""
