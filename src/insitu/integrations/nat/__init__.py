"""The parts of the NeMo Agent Toolkit's documented surface that nothing else here needs.

`base_parser` and the parsers beside it convert the steps that a framework's callbacks report to OpenAI messages; `ttc`
has the test-time-compute strategies, with the built-in `best_of_n_selection`.

The documented import paths are in `nat`, an alias table. The rest of insitu runs without this package.
"""
