"""Files of the system, and objects of stores, by their paths: sizes, names, and bytes."""
