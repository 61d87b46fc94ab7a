"""The protocols of OpenPipe ART, next to the native one: its official clients sample from and train this backend.

messages     what clients send; settings: their configuration in our terms; rows: trajectories to training rows
models       the models they train, their names and checkpoints; history: what was logged of each step
jobs         a training request as a job, trained once; answers: how it and errors are told
server       the routes of `art run`; serverless: those of `art.ServerlessBackend`
"""
