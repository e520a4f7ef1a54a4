"""Random checkpoints of real models' geometry whose routing is like a trained model's.

Plain random weights will not do as a stand-in: attention averages their tokens until all hidden states are alike, and a
quarter of the experts serves nearly every request. What is done instead, by module:

* `scales`: every branch gets the size at which neighbouring tokens share about a quarter of their experts and an INT4
  draft chooses about 95 % of them alike, in every layer. The sizes follow from a recursion over the layers.
* `tensors`: embeddings are independent Gaussians and two *anchor* channels that hold the same constants in every token.
  Only queries and keys read the anchors, as a constant pair whose score depends on the distance alone, through the
  rotary embedding: attention is a mean over the last five or six tokens with some noise from the tokens themselves; of
  16384 tokens of context those more than 64 back weigh 4 % together at most. It is the slowly varying part of the
  stream; embeddings and experts are the part of the token's own. Router rows are orthogonal, so no expert is preferred.
  Nothing writes to the anchors and nothing else reads them, so no constant reaches the routers.
* The head scores the successor of a token in one random cycle through all ids that have a text, with a margin that
  Gaussian noise from the context overcomes now and then. Greedy texts therefore neither stop nor run in small circles,
  and a draft is wrong at about one position in twenty.

What it gave is in docs/usage.md, beside the trained embedded model.
"""
