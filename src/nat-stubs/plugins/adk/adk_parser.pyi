from insitu.toolkit.parsers.adk_parser import *
