"""Parts of the nano trainer: corpus, tokenizer, model, optimizer, training loops, export, evaluation, cards."""
