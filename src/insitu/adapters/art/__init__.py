"""OpenPipe ART: trajectories as its client library spells them, trained by any server that speaks its protocol."""
