"""The tool of look_up.py behind the Model Context Protocol, over stdio: each environment process starts its own."""

from look_up import look_up  # beside this file
from mcp.server import MCPServer

server = MCPServer("codes")
server.tool()(look_up)

if __name__ == "__main__":
    server.run()
