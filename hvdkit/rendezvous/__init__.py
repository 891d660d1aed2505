"""The server through which the ranks of a Gloo job find each other."""
