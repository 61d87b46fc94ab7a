"""One module for each agent framework, imported when a model object of that framework is asked for."""
