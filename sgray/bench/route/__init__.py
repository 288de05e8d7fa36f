"""A simulation of routing: the real router, scheduler and cache, with a clock and an executor of numbers."""
