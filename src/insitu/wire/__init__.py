"""What crosses a socket and who may send it: formats, access, limits, connections, and the redaction of secrets.

In: bytes and headers of requests. Out: the same, checked, or an error that names what is wrong. Read `http_format`
first, then `json_values`; `http_server` is what all servers share, `connection` what all clients do.
"""
