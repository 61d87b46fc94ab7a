"""The protocols of OpenPipe ART: its official clients sample from and train this backend.

routes        the endpoints of `art run` and of `art.ServerlessBackend`, their bodies and responses; read it first
jobs          a client's training request as a training job
trajectories  parses what clients send; settings: their configuration as training settings; rows: training rows
models        the models that clients train, their names, checkpoints and logged metrics
"""
