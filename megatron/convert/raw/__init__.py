"""The formats of the authors' own code: files of LLaMA and Mistral, folders of mamba-ssm."""
