"""Side-by-side comparisons of the stages. Each measurement runs in fresh processes and ends in a JSON file."""
