"""The protocols of OpenPipe ART: its official clients sample from and train this backend.

routes        the endpoints of `art run` and of `art.ServerlessBackend`
jobs          a client's training request as a training job
trajectories  parses what clients send; settings: their configuration as training settings; rows: training rows
models        the models that clients train, their names, checkpoints and logged metrics
responses     request bodies and their models, errors, and the streamed response of a training request
"""

from insitu.backend.http import ApiRoute
from insitu.backend.protocols import Services
from insitu.integrations.art.server.jobs import ArtJobs
from insitu.integrations.art.server.models import ArtModels
from insitu.integrations.art.server.responses import Uploads
from insitu.integrations.art.server.routes import art_run_routes, serverless_routes


def routes(services: Services) -> list[ApiRoute]:
    models = ArtModels(services)
    jobs, uploads = ArtJobs(models, services), Uploads()
    return [*art_run_routes(models, jobs, uploads, services), *serverless_routes(models, jobs, uploads)]
