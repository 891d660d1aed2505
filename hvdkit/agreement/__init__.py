"""Let the ranks agree: small collectives, comparisons, errors on all ranks."""
