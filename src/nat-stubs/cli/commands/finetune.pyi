from insitu.cli.finetune import *
