"""What the commands of `hvdkit` share: tables, options, results of checks."""
