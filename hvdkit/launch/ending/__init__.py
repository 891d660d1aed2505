"""How a job ends: events, the facts that follow from them, the outcome, and reports."""
