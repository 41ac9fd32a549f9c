"""MATLAB files of the versions 4 to 7."""
