"""Les Houches event files."""
