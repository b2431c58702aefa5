"""Finds out why a client reaches no server: gRPC's own words name neither the mistake nor the option to look at."""

from __future__ import annotations

import socket
import ssl

from fedrpc.tls.credentials import ClientTls
from fedrpc.tls.endpoint import split_address

_TIMEOUT_S = 2.0  # for each step
_WRONG_NAME = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
_WRONG_TIME = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED


def find_obstacle(address: str, tls: ClientTls | None) -> str:
    """Why a client cannot connect, and what to look at; "" when nothing is wrong with address and certificates."""
    try:
        with _connect(address):
            pass
    except socket.gaierror as error:
        return f"its name cannot be resolved ({error.strerror}); look at --server"
    except TimeoutError:
        return f"it cannot be reached within {_TIMEOUT_S:g} s; look at --server, and for a firewall on the way"
    except OSError as error:
        return f"{error.strerror or error}; look at --server, and whether the server has started"
    speaks_tls = _speaks_tls(address)
    if speaks_tls is None:
        return "something is there that gives no answer; look at --server"
    if tls is None:
        return "the server speaks TLS and this client does not; give --tls-ca" if speaks_tls else ""
    if not speaks_tls:
        return "the server speaks no TLS; leave --tls-ca out, or start the server with --tls-cert and --tls-key"
    return _check_certificates(address, tls)


def _connect(address: str) -> socket.socket:
    return socket.create_connection(split_address(address), _TIMEOUT_S)


def _make_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    return context


def _speaks_tls(address: str) -> bool | None:
    """Whether what is at an address speaks TLS; None when it says nothing."""
    context = _make_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connect(address) as plain, context.wrap_socket(plain):
            return True
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return None
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # an alert is TLS; whatever else cannot be read as TLS is none
    except OSError:
        return None


def _check_certificates(address: str, tls: ClientTls) -> str:
    """What is wrong with the certificate of either side; "" when nothing is."""
    context, host = _make_context(), split_address(address)[0]
    context.load_verify_locations(tls.ca)
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key)
    try:
        with _connect(address) as plain, context.wrap_socket(plain, server_hostname=host) as wrapped:
            # A server speaks first, and one that refuses the client's certificate hangs up after the handshake.
            if wrapped.recv(1):
                return ""
    except ssl.SSLCertVerificationError as error:
        return _explain_refusal(error, host, tls)
    except TimeoutError:
        return ""
    except OSError:  # an alert, or a hang-up
        pass
    if tls.cert is None:
        return "the server hangs up: it may ask for a client's certificate; give --tls-cert and --tls-key"
    return f"the server hangs up: it may refuse this client's certificate; look at --tls-cert {tls.cert}"


def _explain_refusal(error: ssl.SSLCertVerificationError, host: str, tls: ClientTls) -> str:
    if error.verify_code in _WRONG_NAME:
        return f"the server's certificate is not for {host}; look at --server, or make one for that name (fedrpc certs)"
    if error.verify_code in _WRONG_TIME:
        return f"the server's certificate is not valid now ({error.verify_message}); make another, or look at the clock"
    return f"the server's certificate is not of the CA in --tls-ca {tls.ca} ({error.verify_message})"
