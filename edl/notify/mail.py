"""Mail by SMTP."""

from __future__ import annotations

import email.utils
import smtplib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import EmailMessage

from edl.errors import NotificationError
from edl.notify.notification import Notification

NAME_S = 2.0
"""Seconds that the name server has for this host's name."""


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail server and the recipients."""

    label: str
    host: str
    port: int
    sender: str
    recipients: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    """TLS from the beginning (``smtps://``); otherwise STARTTLS, if the server offers it."""
    plain: bool = False
    """Whether a login may be sent without TLS (``?plain=yes``)."""

    def send(self, notification: Notification, now_s: float, limit_s: float) -> None:
        """Send one mail to all recipients. Raises ``NotificationError``."""
        message = self._message(notification, now_s)
        try:
            with self._session(limit_s) as session:
                refused = session.send_message(message, self.sender, list(self.recipients))
        except smtplib.SMTPRecipientsRefused as error:
            codes = {code for code, _ in error.recipients.values()}
            raise NotificationError(
                f"it refused all recipients (status {_listed(codes)})", retry=min(codes) < 500
            ) from None
        except smtplib.SMTPAuthenticationError as error:
            raise NotificationError(f"it refused the login (status {error.smtp_code})", retry=False) from None
        except smtplib.SMTPResponseException as error:
            retry = error.smtp_code < 500
            raise NotificationError(f"it answered with status {error.smtp_code}", retry=retry) from None
        except smtplib.SMTPNotSupportedError as error:
            raise NotificationError(str(error), retry=False) from None
        except ssl.SSLCertVerificationError as error:
            raise NotificationError(f"its certificate is not valid: {error.verify_message}", retry=False) from None
        except TimeoutError:
            raise NotificationError(f"it did not answer within {limit_s:g} s", retry=True) from None
        except smtplib.SMTPServerDisconnected as error:  # also after a timeout of an answer
            raise NotificationError(f"it does not answer: {error}", retry=True) from None
        except (OSError, smtplib.SMTPException) as error:
            why = getattr(error, "strerror", "") or type(error).__name__
            raise NotificationError(f"it cannot be reached: {why}", retry=True) from None
        if refused:
            codes = {code for code, _ in refused.values()}
            what = f"it refused {len(refused)} of {len(self.recipients)} recipients (status {_listed(codes)})"
            raise NotificationError(what, retry=False)

    @contextmanager
    def _session(self, limit_s: float) -> Iterator[smtplib.SMTP]:
        context = ssl.create_default_context()
        here = "localhost"  # replaced below: by default smtplib asks the name server, however long that takes
        if self.tls:
            session: smtplib.SMTP = smtplib.SMTP_SSL(self.host, self.port, here, timeout=limit_s, context=context)
        else:
            session = smtplib.SMTP(self.host, self.port, here, timeout=limit_s)
        try:
            session.local_hostname = _own_name() or _literal(session)
            session.ehlo()
            if not self.tls and session.has_extn("starttls"):
                session.starttls(context=context)
                session.ehlo()
            elif not self.tls and self.user and not self.plain:
                what = (
                    "it offers no STARTTLS, so the password is not sent. Use smtps://, or add plain=yes to the address"
                )
                raise NotificationError(what, retry=False)
            if self.user:
                session.login(self.user, self.password)
            yield session
        finally:
            # The mail has been taken, or not, whatever the server answers to this: ``with session`` would raise it.
            with suppress(smtplib.SMTPException, OSError):
                session.quit()
            session.close()

    def _message(self, notification: Notification, now_s: float) -> EmailMessage:
        message = EmailMessage()
        message["From"] = self.sender
        message["To"] = ", ".join(self.recipients)
        message["Subject"] = notification.subject
        message["Date"] = email.utils.formatdate(now_s)
        message["Message-ID"] = f"<{notification.id}@edl.invalid>"
        message["Auto-Submitted"] = "auto-generated"  # so that absence notes are not sent in answer
        message.set_content(notification.body)
        return message


def _own_name() -> str:
    """This host's full name; empty if it has none, or is not known within ``NAME_S``."""
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(socket.getfqdn()), name="edl-name", daemon=True)
    with suppress(RuntimeError):  # there can be no further thread at present
        asking.start()
        asking.join(NAME_S)
    return found[0] if found and "." in found[0] else ""


def _literal(session: smtplib.SMTP) -> str:
    """This host's address as the mail server sees it, in the form that stands for a name (RFC 5321, 4.1.3)."""
    address = session.sock.getsockname()[0] if session.sock is not None else "127.0.0.1"
    return f"[IPv6:{address.partition('%')[0]}]" if ":" in address else f"[{address}]"


def _listed(codes: set[int]) -> str:
    return ", ".join(str(code) for code in sorted(codes))
