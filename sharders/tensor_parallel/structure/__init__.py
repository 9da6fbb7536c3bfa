"""What a transformer is made of, by structure, and what its shapes are when it runs."""
