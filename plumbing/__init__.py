"""How the things are done that train.py says are to be done. Nobody need open this folder."""
