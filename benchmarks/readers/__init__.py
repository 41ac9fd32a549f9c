"""The readers that are measured: matex_data, its peers, and the machine's ceiling."""
