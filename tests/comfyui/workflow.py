# SPDX-License-Identifier: Apache-2.0
"""Workflows as ComfyUI's editor saves them, as the prompts that its server takes: subgraphs are opened, widgets get their names."""

LOOSE = {"MarkdownNote", "Note"}
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
SEED_CONTROL = ("randomize", "fixed", "increment", "decrement")


def _links(graph):
    """{link id: (origin node, slot)}; the editor writes lists in a workflow and objects in a subgraph."""
    return {(x[0] if isinstance(x, list) else x["id"]): ((x[1], x[2]) if isinstance(x, list) else (x["origin_id"], x["origin_slot"]))
            for x in graph["links"]}


def _widgets(info, key, spec, found):
    """Names of a node's widgets in the order in which the editor writes their values."""
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    if isinstance(kind, list) or (kind in WIDGETS and not options.get("forceInput")):
        found.append(key)
        if options.get("control_after_generate") or (kind == "INT" and key in ("seed", "noise_seed")) or options.get("image_upload"):
            found.append(None)
    elif kind == "COMFY_DYNAMICCOMBO_V3":
        found.append(key)


def widget_names(info):
    found = []
    for part in ("required", "optional"):
        for key in info["input_order"].get(part, []):
            _widgets(info, key, info["input"][part][key], found)
    return found


class Graph:
    """One level. outer: the node of the level above that this one is inside of, and that level."""

    def __init__(self, graph, definitions, prefix="", outer=None):
        self.links, self.prefix, self.outer, self.definitions = _links(graph), prefix, outer, definitions
        self.nodes = {n["id"]: n for n in graph["nodes"]}
        self.graph = graph
        self.inner = {}
        for n in graph["nodes"]:
            if n["type"] in definitions and n.get("mode", 0) == 0:
                self.inner[n["id"]] = Graph(definitions[n["type"]], definitions, f"{prefix}{n['id']}:", (self, n))

    def source(self, link):
        """Where a link comes from: (node id in the prompt, slot), ("value", x) of an outer widget, or None."""
        origin, slot = self.links[link]
        if self.outer is not None and origin == self.graph["inputNode"]["id"]:
            level, node = self.outer
            name = self.graph["inputs"][slot]["name"]
            given = next((i for i in node.get("inputs", []) if i["name"] == name), None)
            if given is not None and given.get("link") is not None:
                return level.source(given["link"])
            return "outer", name
        node = self.nodes[origin]
        if origin in self.inner:
            inside = self.inner[origin]
            target = next(i for i, x in inside.links.items() if i in inside.graph["outputs"][slot]["linkIds"])
            return inside.source(target)
        if node.get("mode", 0) == 4:  # bypassed: the first input of the same type
            kind = node["outputs"][slot]["type"]
            through = next((i["link"] for i in node["inputs"] if i["type"] == kind and i.get("link") is not None), None)
            return self.source(through) if through is not None else None
        if node.get("mode", 0) == 2 or node["type"] in LOOSE:
            return None
        return f"{self.prefix}{origin}", slot

    def prompt(self, object_info, out):
        for n in self.graph["nodes"]:
            if n["id"] in self.inner:
                self.inner[n["id"]].prompt(object_info, out)
            elif n.get("mode", 0) == 0 and n["type"] not in LOOSE:
                out[f"{self.prefix}{n['id']}"] = {"class_type": n["type"], "inputs": self._inputs(n, object_info[n["type"]])}
        return out

    def _inputs(self, n, info):
        values, given = n.get("widgets_values") or [], {}
        if isinstance(values, dict):
            given.update(values)
        else:
            given.update({k: v for k, v in zip(widget_names(info), values) if k is not None})
        for i in n.get("inputs", []):
            if i.get("link") is not None:
                source = self.source(i["link"])
                if source is None:
                    given.pop(i["name"], None)
                elif source[0] != "outer":  # else the widget of the inner node has the value
                    given[i["name"]] = list(source)
        return given


def to_prompt(workflow, object_info):
    definitions = {g["id"]: g for g in workflow.get("definitions", {}).get("subgraphs", [])}
    return Graph(workflow, definitions).prompt(object_info, {})


def used_types(workflow):
    definitions = {g["id"]: g for g in workflow.get("definitions", {}).get("subgraphs", [])}
    nodes = workflow["nodes"] + [n for g in definitions.values() for n in g["nodes"]]
    return {n["type"] for n in nodes if n["type"] not in definitions and n["type"] not in LOOSE}


def without_unused(prompt, output):
    """Only what the output node needs."""
    needed, todo = set(), [output]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [v[0] for v in prompt[node]["inputs"].values() if isinstance(v, list) and len(v) == 2 and v[0] in prompt]
    return {k: v for k, v in prompt.items() if k in needed}
