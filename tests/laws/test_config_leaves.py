"""Every knob of the configuration, frozen: a new one is a reviewed change of this list."""

from sgray.config import leaves

LEAVES = {
    "api.admin_keys_file",
    "api.api_keys_file",
    "api.max_batch",
    "api.max_body_bytes",
    "api.max_content_parts",
    "api.max_header_bytes",
    "api.max_json_depth",
    "api.max_messages",
    "api.max_n",
    "api.max_stop",
    "api.max_stop_chars",
    "api.max_url_bytes",
    "api.reasoning_parser",
    "api.request_timeout_s",
    "api.tool_call_parser",
    "batches.batches_dir",
    "batches.max_batch_bytes",
    "batches.max_batch_rows_in_flight",
    "grammar.compile_timeout_s",
    "grammar.max_source_bytes",
    "memory.disable_radix_cache",
    "memory.max_total_tokens",
    "memory.mem_fraction_static",
    "memory.page_size",
    "model.chat_template",
    "model.context_length",
    "model.device",
    "model.dtype",
    "model.load_format",
    "model.model_path",
    "model.num_threads",
    "model.revision",
    "model.served_model_name",
    "model.skip_tokenizer_init",
    "model.tokenizer_path",
    "parallel.tp_size",
    "schedule.chunked_prefill_size",
    "schedule.cuda_graph_max_bs",
    "schedule.disable_cuda_graph",
    "schedule.disable_overlap",
    "schedule.max_queued_requests",
    "schedule.max_running_requests",
    "schedule.mixed_prefill_size",
    "schedule.random_seed",
    "schedule.schedule_policy",
    "serve.autoscaling_policy",
    "serve.downscale_delay_s",
    "serve.graceful_shutdown_timeout_s",
    "serve.health_check_period_s",
    "serve.max_replicas",
    "serve.min_replicas",
    "serve.num_cpus_per_ingress",
    "serve.num_cpus_per_replica",
    "serve.num_ingress_replicas",
    "serve.routing_policy",
    "serve.target_ongoing_requests",
    "serve.target_ttft_s",
    "serve.upscale_delay_s",
    "serve.wedge_timeout_s",
}


def test_the_leaves_are_these_and_no_others() -> None:
    assert set(leaves()) == LEAVES


def test_there_are_few_of_them() -> None:
    assert len(LEAVES) <= 64
