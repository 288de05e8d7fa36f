"""The builds of the step's inputs."""

from aot import Build

from sgray.kernels.step_inputs.kernel import BLOCK, _expand, _place_pages, _record


def builds() -> list[Build]:
    pointers = ("words", "page_table", "last_tokens", "tokens", "positions", "locations")
    pointers += ("last_rows", "draw_slots", "draw_positions")
    sizes = ("table_stride", "max_sequences", "tokens_place", "num_rows")
    expand = dict.fromkeys(pointers, "*i32") | dict.fromkeys(sizes, "i32")
    record = {"tokens": "*i32", "draw_slots": "*i32", "last_tokens": "*i32", "count": "i32"}
    place = {"words": "*i32", "page_table": "*i32", "table_stride": "i32", "pages_place": "i32"}
    return [
        *(Build(_place_pages, place, {"BLOCK": BLOCK, "PDL": pdl}, portable=not pdl) for pdl in (0, 1)),
        *(Build(_expand, expand, {"page_size": 64, "BLOCK": BLOCK, "PDL": pdl}, portable=not pdl) for pdl in (0, 1)),
        *(Build(_record, record, {"BLOCK": BLOCK, "PDL": pdl}, portable=not pdl) for pdl in (0, 1)),
    ]
