"""How far the answers of each reuse technique are from those of a full prefill, and at what cost.

``python -m benchmarks.fidelity --model DIR --data FILE``: per record one prompt of several documents and a question; per
arm (technique, options, anchor) one prefill that scores the answer of the full prefill, teacher-forced. A table goes to
stderr, one JSON object to the last line of stdout.

| column | meaning |
|---|---|
| budget | fresh token-layers of reusable tokens / (layers x reusable tokens), as charged by the executor |
| kl_first | KL(full || arm) in nats at the first answer token; mean, median, 95th percentile over records |
| kl_answer | mean of that KL over the tokens of the full prefill's greedy answer |
| top1 | share of records whose most likely first token is the same |
| recovered | 1 - KL / KL(naive), means over the same records, naive behind the same anchor |
| gold_nll | mean negative log likelihood of the tokens of the reference answer |
| score | F1 of words (question answering) or ROUGE-L (summaries) of the arm's own greedy answer |
| ttft_ratio | prefill time / full prefill time of the same prompt, median |
"""
