"""The same attempt at an episode in another process, a workflow service.

In: a dataset row, the key of an episode and its options. Out: the episode. Lines of JSON carry both (`attempt_records`,
read it first). A run has a `pool` of services, each with a connection (`client`), and an `executor` that sends them
attempts. In a service, `service` is the HTTP server with its end of a connection, and `hosted` keeps the workflows that
it has built.
"""
