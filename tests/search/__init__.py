"""Searches for defects: drawn jobs, faults, inputs and attackers."""
