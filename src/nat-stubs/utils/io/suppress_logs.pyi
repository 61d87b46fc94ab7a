from insitu.workflow.logs import *
