"""NeMo Customizer: preference pairs go in, a model that NVIDIA's services have trained on them comes out.

The pairs become records (`records.py`), which the adapter uploads and trains on (`trainer_adapter.py`) through the
official client libraries (`services.py`, the only module that knows them); it can deploy the model.
`trainer.py` collects the pairs and drives the adapter; read it first.
"""
