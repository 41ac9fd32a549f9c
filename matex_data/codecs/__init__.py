"""Undo the filters that a chunk went through when it was written."""
