"""How the ranks of a Gloo job find each other."""
