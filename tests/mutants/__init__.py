"""Mutants: are the tests of `make test` strong enough to notice a change of the code that matters?

A mutant is the package with one small change: a comparison that includes its bound, a keyword that is left out, a lock
that is not taken. Tests that all pass on it do not notice the change. cosmic-ray finds the sites and writes changed
modules; this package draws mutants by a seed, and runs the tests that execute the changed line, fastest first.
"""
