from insitu.workflow.functions import *
