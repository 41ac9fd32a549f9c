"""Which rank gets which sample when: pure functions of integers."""
