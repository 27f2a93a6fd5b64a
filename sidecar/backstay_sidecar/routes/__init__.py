"""The REST routes, one module per audience. The only place, with app.py, that knows FastAPI."""
