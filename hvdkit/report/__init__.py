"""`hvdkit report`: one HTML page about a training run, or about several runs in comparison.

`gathering` reads what the monitor, the launcher and the checkpointer have left in a folder.
`sections` and `comparison` turn these records into sentences, tables and charts. `page` turns these
into HTML.
"""
