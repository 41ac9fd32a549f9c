"""Reader of ROOT files: ``TTree`` and ``RNTuple``."""
