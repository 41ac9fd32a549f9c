"""Synchronous data-parallel training: the average over the ranks is part of the graph."""

if __name__ != "matex_data.training":
    raise ImportError("import this package as matex_data.training: two copies of a class would be two classes")
