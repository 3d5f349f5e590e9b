"""Loading of Hugging Face encoders and their packed attention."""
