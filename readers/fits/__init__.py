"""FITS files of astronomy: tables, and images whose planes or extensions are samples."""
