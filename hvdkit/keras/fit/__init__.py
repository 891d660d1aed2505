"""One `fit` on several ranks: the callback list, and what the ranks decide together."""
