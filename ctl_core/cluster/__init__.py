"""Several devices and processes: who this one is, and what they tell each other."""
