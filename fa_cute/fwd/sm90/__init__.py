"""Forward on Hopper (sm_90a)."""
