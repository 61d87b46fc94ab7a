"""OpenPipe ART: trains through its client library on any server that speaks its protocol."""
