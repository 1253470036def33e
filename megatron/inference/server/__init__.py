"""A model behind OpenAI's HTTP interface: rank 0 talks to clients, all ranks of all copies of the model decode."""
