"""`hvdkit run --nodes`: a job whose nodes a user or a cluster starts by the same command.

Node 0 listens (`gathering`). Each other node connects to node 0 (`joining`). Both prove that they
know the job's key (`handshake`). After the handshake, the other nodes are agents of the launcher on
node 0.
"""
