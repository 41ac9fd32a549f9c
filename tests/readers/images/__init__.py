"""Tests of the images reader."""
