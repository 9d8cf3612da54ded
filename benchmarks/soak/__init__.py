"""Random faults on real jobs of all kinds at once, and what must hold through all of them."""
