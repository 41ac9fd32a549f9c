"""The index model that readers return, and the layouts that turn rows into byte ranges."""
