"""Reads of given samples: which bytes are read when, what decodes them, and which memory receives them."""
